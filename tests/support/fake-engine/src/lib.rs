//! An engine that speaks a real engine's dialect and obeys a script.
