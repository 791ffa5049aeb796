"""The CachedMultiHeadAttention family: layers, cache policies, codecs and masks.

Names are imported on first use, so that reading one module does not load all.
"""
