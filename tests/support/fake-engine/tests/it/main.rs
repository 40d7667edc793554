//! The fake engine, driven from outside as the runner drives it.

#[cfg(test)]
mod codex;
#[cfg(test)]
mod dialect;
#[cfg(test)]
mod driver;
#[cfg(test)]
mod faults;
#[cfg(test)]
mod sessions;
