"""The readers: a file that defines a Format is one. docs/adding_a_reader.md shows how."""
