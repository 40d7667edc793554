//! Scripted model servers on loopback.
