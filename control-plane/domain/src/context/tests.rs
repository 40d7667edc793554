//! Tests of the composer.
