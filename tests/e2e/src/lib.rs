//! The end-to-end tests of Roundhouse stand in `tests/`: real binaries, real engine CLIs, a scripted model as judge.
//! This library is empty.
