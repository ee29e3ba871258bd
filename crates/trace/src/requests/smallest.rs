//! The smallest device on which a program completes.

use warpool::Result;

use super::{Conditions, Requests};
use crate::stop::Stop;

impl Requests {
    /// The least memory of a device, with the context, on which it completes, up to `tolerance`: on a device of that
    /// size it was run and completed, on one that is smaller by the tolerance it was run and did not. `enough` is a
    /// size on which it completes; `live` is less than or equal to what it needs. `None` if it was stopped.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn smallest(
        &self,
        conditions: &Conditions,
        live: u64,
        enough: u64,
        tolerance: u64,
        stop: &Stop,
    ) -> Result<Option<u64>> {
        let (mut fails, mut fits) = (live.min(enough), enough);
        // Often what is live suffices, after the cache was returned to the driver.
        while fits - fails > tolerance.max(1) {
            let middle = fails + (fits - fails) / 2;
            let conditions = Conditions { capacity: Some(middle), ..conditions.clone() };
            let Some(outcome) = self.run(&conditions, stop)? else { return Ok(None) };
            if outcome.out_of_memory.is_some() { fails = middle } else { fits = middle }
        }
        Ok(Some(fits))
    }
}
