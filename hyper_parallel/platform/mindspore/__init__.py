"""The MindSpore backend, on CPU and Ascend."""
