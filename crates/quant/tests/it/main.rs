//! Tests of blocks and dot products against what others computed of them.

mod device_headers;
mod golden;
mod law;
