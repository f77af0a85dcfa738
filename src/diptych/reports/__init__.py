"""What people look at: pages, grids of answers, charts."""
