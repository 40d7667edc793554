//! End-to-end tests: real binaries, real engines, scripted models.
