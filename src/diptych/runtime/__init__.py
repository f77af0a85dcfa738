"""A model folder's two encoders as ONNX files: pictures and texts to vectors, without torch."""
