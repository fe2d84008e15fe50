"""Load an artifact and run it: no compiler, no model library, no ONNX needed."""

from mmcompile.runtime.engine import Engine, StreamChunk
from mmcompile.runtime.loading import load
from mmcompile.runtime.module import ModuleEngine
from mmcompile.runtime.sequence import Generation, SamplingParams, TokenEvent

__all__ = ["Engine", "Generation", "ModuleEngine", "SamplingParams", "StreamChunk", "TokenEvent", "load"]
