"""The engine in PostgreSQL with pgvector."""
