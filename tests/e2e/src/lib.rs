//! What the end-to-end tests and the program `roundhouse-chaos` share. The tests themselves stand in `tests/`: real
//! binaries, real engine CLIs, a scripted model as judge.

pub mod chaos;
mod stream;

pub use stream::{replay, told};
