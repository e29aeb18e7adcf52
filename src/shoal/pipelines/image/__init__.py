"""Pictures to the tensors of an image tower: what a file may be, its pixels, and what the model's preprocessor does."""

from shoal.pipelines.image.pipeline import ImagePipeline

__all__ = ["ImagePipeline"]
