"""ONNX files as captured graphs: read and check a model, run its operators through torch, export that."""
