"""The Hugging Face model directory: config keys, tensor names, defaults, chat template."""
