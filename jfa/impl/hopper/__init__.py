"""Kernels in TLX for sm_90: warp-specialised, with TMA, wgmma and mbarriers placed by hand."""
