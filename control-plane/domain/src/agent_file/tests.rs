//! Tests of agent files.
