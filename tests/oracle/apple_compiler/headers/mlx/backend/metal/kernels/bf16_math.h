// In the place of MLX's: math functions for bfloat by builtins of Apple's compiler, which
// msl_shim.h has as well.
