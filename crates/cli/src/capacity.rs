//! The device of a what-if, or of the recording: `--capacity` and `--gpu`, the same for all commands that take them.

use warpool_trace::cards::Card;

use crate::size;

/// The memory of the device.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct CapacityArgs {
    /// Memory of the device, for example 24GiB: of the whole card, as in PyTorch's out-of-memory message; a context
    /// takes 0.5 GiB of it [default: that of the card, if it can be inferred from the recording]
    #[arg(long, value_name = "SIZE", value_parser = size::parse, conflicts_with = "gpu")]
    capacity: Option<u64>,
    /// The card in place of its memory, for example h100-80gb or rtx4090; `--gpu list` names them
    #[arg(long, value_name = "NAME", value_parser = parse_card)]
    gpu: Option<&'static Card>,
}

impl CapacityArgs {
    /// The memory in bytes, if it was given.
    pub fn bytes(self) -> Option<u64> {
        self.capacity.or_else(|| self.gpu.map(Card::bytes_total))
    }

    /// The device in words, if it was given.
    pub fn in_words(self) -> Option<String> {
        let size = size::format(self.bytes()?);
        Some(self.gpu.map_or_else(|| size.clone(), |card| format!("{size} ({})", card.name)))
    }
}

fn parse_card(name: &str) -> Result<&'static Card, String> {
    Card::find(name).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Command {
        #[command(flatten)]
        capacity: CapacityArgs,
    }

    fn parse(arguments: &[&str]) -> Result<Option<u64>, String> {
        let arguments = ["command"].iter().chain(arguments);
        Command::try_parse_from(arguments).map(|command| command.capacity.bytes()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_card_is_its_memory() {
        assert_eq!(parse(&[]), Ok(None));
        assert_eq!(parse(&["--capacity", "24GiB"]), Ok(Some(24 << 30)));
        assert_eq!(parse(&["--gpu", "RTX4090"]), Ok(Some(24_081 << 20)));
    }

    #[test]
    fn wrong_cards_are_errors_that_list_the_choices() {
        for (arguments, text) in [
            (&["--gpu", "a100"][..], "a100-40gb, a100-80gb"),
            (&["--gpu", "list"], "v100-32gb, a100-40gb"),
            (&["--gpu", "h200", "--capacity", "24GiB"], "cannot be used with"),
        ] {
            let error = parse(arguments).expect_err("not a device");
            assert!(error.contains(text), "{error}");
        }
    }
}
