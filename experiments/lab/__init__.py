"""The lab: what every experiment is run, kept, listed, drawn and reported by."""
