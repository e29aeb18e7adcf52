"""ONNX graphs of text embedding models: built from config.json and safetensors, or shipped with the model."""
