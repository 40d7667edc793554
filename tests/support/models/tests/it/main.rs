//! The scripted model from outside: with a plain HTTP client, and with the real CLIs.

#[cfg(test)]
mod claude;
#[cfg(test)]
mod cli;
#[cfg(test)]
mod client;
#[cfg(test)]
mod codex;
#[cfg(test)]
mod codex_cli;
#[cfg(test)]
mod control;
#[cfg(test)]
mod faults;
#[cfg(test)]
mod replies;
#[cfg(test)]
mod responses;
