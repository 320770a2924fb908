"""The kernels: csrc's CUDA C++ (built by NVRTC) and the same arithmetic in numba for the CPU.

``adam`` and ``pack`` make launches; ``build`` and ``cuda`` compile and start the CUDA side;
``pool`` runs the CPU side; ``golden`` and ``gate`` check them. Importing needs no GPU, driver or
compiler.
"""
