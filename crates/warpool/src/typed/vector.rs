//! The common part of vectors of device memory and of pinned memory.

/// Declares the methods and traits that do not depend on where the memory is, for a struct with the fields `buffer`,
/// `len` and `elements`.
macro_rules! vector {
    ($name:ident) => {
        impl<T: Pod> $name<T> {
            /// Gives it a name, for errors and for hazard reports of the simulated GPU. Only the first name is used.
            #[must_use]
            pub fn with_label(self, label: &str) -> Self {
                self.buffer.set_label(label);
                self
            }

            /// Its name.
            #[must_use]
            pub fn label(&self) -> Option<&str> {
                self.buffer.label()
            }

            /// How many elements it has; can be read while a device uses it.
            #[must_use]
            pub fn len(&self) -> usize {
                self.len
            }

            /// Whether it has no elements.
            #[must_use]
            pub fn is_empty(&self) -> bool {
                self.len == 0
            }

            /// Shared access to all of it, for work on streams.
            #[must_use]
            pub fn view(&self) -> View<'_, T> {
                View { part: Part::shared(&self.buffer, self.len) }
            }

            /// Exclusive access to all of it, for work on streams.
            #[must_use]
            pub fn view_mut(&mut self) -> ViewMut<'_, T> {
                ViewMut { part: Part::exclusive(&mut self.buffer, self.len) }
            }

            /// Shared access to a part of it, for work on streams.
            /// [`BufferError::Range`](crate::typed::BufferError::Range) if the range does not lie in it.
            pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<View<'_, T>> {
                self.view().slice(range)
            }

            /// Exclusive access to a part of it, for work on streams.
            pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<ViewMut<'_, T>> {
                self.view_mut().into_slice(range)
            }

            /// The parts before `middle` and from `middle` on. Streams that use different parts do not wait for each
            /// other.
            pub fn split_at_mut(&mut self, middle: usize) -> Result<(ViewMut<'_, T>, ViewMut<'_, T>)> {
                self.view_mut().split_at_mut(middle)
            }
        }

        impl<T> Sealed for &$name<T> {}
        impl<T> Sealed for &mut $name<T> {}

        impl<'a, T: Pod> IntoView<'a, T> for &'a $name<T> {
            fn into_view(self) -> View<'a, T> {
                self.view()
            }
        }

        impl<'a, T: Pod> IntoViewMut<'a, T> for &'a mut $name<T> {
            fn into_view_mut(self) -> ViewMut<'a, T> {
                self.view_mut()
            }
        }

        impl<T> fmt::Debug for $name<T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{} elements in {:?}", self.len, self.buffer)
            }
        }
    };
}

pub(super) use vector;
