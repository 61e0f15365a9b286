//! (kernels)
