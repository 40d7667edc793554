//! Keeper, init, spool, framing, kill ladder and isolation of engine processes.
