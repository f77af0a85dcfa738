"""Files to pictures, frames and arrays."""
