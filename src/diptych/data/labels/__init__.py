"""Class names, label vocabularies and hash centres."""
