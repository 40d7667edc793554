//! Tests of the implementation that the conformance suite cannot see.
