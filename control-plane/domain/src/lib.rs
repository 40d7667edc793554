//! The rules of the control plane, without any input or output.
