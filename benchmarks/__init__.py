"""Scripts behind the numbers of the documentation; README.md says how to run them."""
