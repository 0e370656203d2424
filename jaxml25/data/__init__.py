"""Data sets as TFDS builders and the Grain pipelines that read them."""
