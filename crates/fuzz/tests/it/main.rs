//! Tests of the driver, and of what the project promises.

mod driver;
mod promises;
