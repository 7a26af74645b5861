//! Memory that requests share: each holds as much of a budget as it uses, and one that finds no room is refused. Knows
//! bytes only.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::ApiError;
use super::limits::FREE_BYTES;

/// Bytes for all requests together.
#[derive(Clone, Debug)]
pub struct Budget(Arc<Semaphore>);

impl Budget {
    pub fn new(bytes: usize) -> Budget {
        Budget(Arc::new(Semaphore::new((bytes >> 10).min(Semaphore::MAX_PERMITS))))
    }

    /// Returns a request's share, nothing yet.
    pub fn room(&self) -> Room {
        Room { budget: self.clone(), held: None }
    }

    /// Bytes that nobody holds.
    #[cfg(test)]
    pub fn free(&self) -> usize {
        self.0.available_permits() << 10
    }
}

/// What a request holds of a budget; dropping it gives it back. The first [`FREE_BYTES`] are free, so that small
/// requests find room beside large ones: the number of connections bounds them.
#[derive(Debug)]
pub struct Room {
    budget: Budget,
    held: Option<OwnedSemaphorePermit>,
}

impl Room {
    /// Holds so many bytes from now on, more or fewer than before.
    ///
    /// # Errors
    /// 429 when the others leave less; what was held stays held.
    pub fn hold(&mut self, bytes: usize) -> Result<(), ApiError> {
        let wanted = bytes.saturating_sub(FREE_BYTES).div_ceil(1 << 10);
        let has = self.held.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        if wanted < has {
            drop(self.held.as_mut().and_then(|held| held.split(has - wanted)));
        } else if wanted > has {
            let more = u32::try_from(wanted - has).map_err(|_| full())?;
            let more = self.budget.0.clone().try_acquire_many_owned(more).map_err(|_| full())?;
            match &mut self.held {
                Some(held) => held.merge(more),
                held => *held = Some(more),
            }
        }
        Ok(())
    }

    /// Holds more bytes, in addition to what is held.
    ///
    /// # Errors
    /// As [`Room::hold`].
    pub fn hold_more(&mut self, bytes: usize) -> Result<(), ApiError> {
        let held = self.held.as_ref().map_or(0, OwnedSemaphorePermit::num_permits) << 10;
        self.hold(held.saturating_add(FREE_BYTES).saturating_add(bytes))
    }
}

fn full() -> ApiError {
    ApiError::busy("too many large requests at once; try again later", 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_counted_and_given_back() {
        let budget = Budget::new(1 << 20);
        let (mut one, mut two) = (budget.room(), budget.room());
        one.hold(FREE_BYTES).unwrap();
        assert_eq!(budget.free(), 1 << 20);
        one.hold(FREE_BYTES + (1 << 20)).unwrap();
        assert_eq!(budget.free(), 0);
        // Small ones still get in, large ones do not.
        two.hold(FREE_BYTES).unwrap();
        assert_eq!(two.hold(FREE_BYTES + 1).unwrap_err().status, 429);
        one.hold(FREE_BYTES + (1 << 19)).unwrap();
        two.hold(FREE_BYTES + (1 << 19)).unwrap();
        assert_eq!(two.hold(usize::MAX).unwrap_err().status, 429);
        drop(one);
        assert_eq!(budget.free(), 1 << 19);
        drop(two);
        assert_eq!(budget.free(), 1 << 20);
        let mut three = budget.room();
        three.hold_more(1 << 19).unwrap();
        three.hold_more(1 << 18).unwrap();
        assert_eq!(budget.free(), 1 << 18);
        assert!(three.hold_more((1 << 18) + 1).is_err() && three.hold_more(usize::MAX).is_err());
    }
}
