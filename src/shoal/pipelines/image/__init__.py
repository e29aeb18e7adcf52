"""Image pipeline: file headers, decoding, and the model's preprocessing into tensors."""

from shoal.pipelines.image.pipeline import ImagePipeline

__all__ = ["ImagePipeline"]
