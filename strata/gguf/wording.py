"""What the errors of this package have in common."""

import reprlib

DAMAGED = "The file is damaged or was not downloaded completely: compare its size with the source's and fetch it again"
CONVERT_AGAIN = "Convert the model again with a current converter, or download a current GGUF of it"

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
shown = _short.repr  # a value from a file for a message: escaped, and never long
