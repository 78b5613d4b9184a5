"""The library inside an unmodified vLLM: its metadata builder, and its attention.

============  ==========================================================================================
module        what it does
============  ==========================================================================================
plugin        switches the rest on: checks vLLM, replaces what the mode names, logs it
surface       what of vLLM this package relies on, as data, and the check of it
settings      vLLM's settings and cache specs as this library's
engine        a platform whose attention is the engine's own (mode ``metadata``)
builder       metadata builders in the place of vLLM's, derived from vLLM's own classes
metadata      the objects that they return, which vLLM's attention reads
shared_step   builders that are called for one batch build it together, in one launch
attention     which of vLLM's layers attend through this library, and how (mode ``attention``)
layer         one of those layers over a step
warmup        compiling while vLLM starts
readers       which of vLLM's modules reads which field of the metadata, as data
doctor        what ``swa-backend doctor --vllm`` tells
============  ==========================================================================================

vLLM is never imported before `plugin.activate` runs, and its classes are reached through the modules that are handed
over, so that everything here also works on stand-ins with the same names.
"""
