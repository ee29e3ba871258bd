//! The categories of memory, in the terms of people who train and serve models.

/// The category of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Category {
    /// Parameters and buffers of modules.
    Parameters,
    /// Gradients of parameters.
    Gradients,
    /// The state that an optimizer keeps for each parameter.
    OptimizerState,
    /// Results of the forward pass that are kept: for the backward pass, in a cache, or in a variable of the program.
    Activations,
    /// Memory that is freed within the pass that allocated it: intermediate results, workspaces.
    Temporaries,
    /// Batches: tensors that the program makes or copies to the device outside of the model.
    Inputs,
    /// Not known from the recording.
    #[default]
    Unknown,
}

impl Category {
    /// All of them, in the order in which they are shown.
    pub const ALL: [Self; 7] = [
        Self::Parameters,
        Self::Gradients,
        Self::OptimizerState,
        Self::Activations,
        Self::Temporaries,
        Self::Inputs,
        Self::Unknown,
    ];

    /// Its name: `parameters`, `gradients`, `optimizer_state`, `activations`, `temporaries`, `inputs`, `unknown`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parameters => "parameters",
            Self::Gradients => "gradients",
            Self::OptimizerState => "optimizer_state",
            Self::Activations => "activations",
            Self::Temporaries => "temporaries",
            Self::Inputs => "inputs",
            Self::Unknown => "unknown",
        }
    }

    /// Its name in a sentence.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::OptimizerState => "optimizer state",
            other => other.name(),
        }
    }

    /// Its place in [`ALL`](Self::ALL).
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// Bytes by category, in the order of [`Category::ALL`].
pub type CategoryBytes = [u64; Category::ALL.len()];
