//! A GPU that replays lists of commands: what is common to every backend that drives its device this way.
//!
//! A backend lowers each op to dispatches that are plain data ([`node`]), which are ordered in levels with barriers
//! between them when a plan is compiled. A step fills a list with its numbers of rows, and a [`Gpu`] replays it. A new
//! device is an implementation of [`Gpu`], a table of kernels and their sources, and a lowering of ops; memory
//! ([`layout`], [`weights`]), the inputs of a step ([`tables`]) and the [`program`] are these. It knows no op but by
//! its dispatches, and no maker of GPUs.

mod gpu;
pub(crate) mod layout;
pub(crate) mod node;
pub(crate) mod program;
pub(crate) mod tables;
pub(crate) mod weights;

pub use gpu::{Buf, Caps, Cmd, Gpu, GpuError, List, Mapped, Pipe, Span, Ticket, Times, Unit, Use};
