//! GPUs that compute together.

use anyhow::{Result, ensure};
use model::plan::partition::MAX_PARTS;

use super::StepArgs;

/// Numbers of CUDA devices, each once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceList {
    numbers: [usize; MAX_PARTS],
    n: usize,
}

impl DeviceList {
    /// Of 1 to [`MAX_PARTS`] numbers.
    pub(super) fn new(given: &[usize]) -> Option<DeviceList> {
        let mut numbers = [0; MAX_PARTS];
        let is_once = given.iter().enumerate().all(|(i, number)| !given[..i].contains(number));
        numbers.get_mut(..given.len()).filter(|given| !given.is_empty() && is_once)?.copy_from_slice(given);
        Some(DeviceList { numbers, n: given.len() })
    }

    /// The numbers in the order given.
    pub fn numbers(&self) -> &[usize] {
        &self.numbers[..self.n]
    }
}

impl StepArgs {
    /// The one CUDA device that is named: `device`, or the first of several.
    ///
    /// # Errors
    /// Both are named.
    pub fn first_device(&self, device: Option<usize>) -> Result<Option<usize>> {
        ensure!(
            device.is_none() || self.devices.is_none(),
            "--device names one GPU and --devices those that compute together: give one of the two"
        );
        Ok(device.or(self.devices.map(|devices| devices.numbers[0])))
    }
}
