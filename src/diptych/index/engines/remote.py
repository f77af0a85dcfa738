"""What the engines on servers say alike."""

ABSENT = "there is no index at {}: index a collection there first."
TAKEN = "{} is already an index: open it, or choose another name."
OTHER = "{} is {} of something else: choose another name for the index."
FAILED = "{} answered with an error ({}): check the index with 'diptych index verify'."
SILENT = "the {} does not answer ({}): start it or check the URL, then try again."
INCOMPLETE = (
    "{} is incomplete ({}): restore the whole index again, or index the collection again under another name."
)
