//! The `roundhouse` command as people run it.
