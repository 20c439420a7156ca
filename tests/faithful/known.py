"""Cases that fail, and what is wrong: whoever mends one deletes its line."""

OPEN: dict[str, str] = {
    "ctc": "an operator that fake tensors cannot run is blamed on the inputs",
    "generated 9": "in the third step, gradients explode and differ",
}
