//! The roundhouse command line.

fn main() {}
