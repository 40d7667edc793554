//! The whole of Roundhouse from outside: real services, the real Claude Code, a scripted model as judge.

mod smoke;
