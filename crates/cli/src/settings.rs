//! `warpool settings`: explains a settings string and lists its problems.

use serde_json::json;
use warpool::memory::settings::lint;

use crate::output::{self, Output, Result, Verdict};

/// The environment variables with settings; later ones are applied on top.
const VARIABLES: [&str; 2] = ["PYTORCH_CUDA_ALLOC_CONF", "WARPOOL_CONF"];

/// Explains a settings string: every setting with its value, and what is invalid or has no effect
///
/// Without a string it reads PYTORCH_CUDA_ALLOC_CONF, and WARPOOL_CONF on top of it, as under PyTorch.
#[derive(Debug, clap::Args)]
#[command(after_help = "Exit status: 0 success, 1 the string is invalid.\n\n\
    Examples:\n  \
    warpool settings\n  \
    warpool settings expandable_segments:True,garbage_collection_threshold:0.8\n  \
    warpool settings 'roundup_power2_divisions:[256:1,512:2,>:4]' --json")]
pub struct Args {
    /// The string, in the format of PYTORCH_CUDA_ALLOC_CONF
    string: Option<String>,
    /// One JSON object per finding and setting
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &Args, output: &mut Output) -> Result<Verdict> {
    let (string, origin) = match &args.string {
        Some(string) => (string.clone(), "from the command line".to_owned()),
        None => from_environment(),
    };
    let lint = lint(&string);
    output.line(format!("settings {string:?} ({origin})\n"))?;
    for problem in &lint.problems {
        output.line(format!("error: {problem}"))?;
        output.object(
            &json!({ "kind": "error", "key": problem.key, "at": problem.at, "message": problem.to_string() }),
        )?;
    }
    for warning in &lint.warnings {
        output.line(format!("warning: {warning}"))?;
        output.object(
            &json!({ "kind": "warning", "key": warning.key, "at": warning.at, "message": warning.to_string() }),
        )?;
    }
    if !lint.is_clean() {
        output.line("")?;
    }
    let mut table = output::table(&["setting", "value", "origin"]);
    for value in &lint.values {
        table.add_row([value.key, &value.value, value.origin.name()]);
        let origin = value.origin.name();
        output.object(&json!({ "kind": "setting", "key": value.key, "value": value.value, "origin": origin }))?;
    }
    let valid = lint.effective.is_some();
    output.table(if valid { "In effect" } else { "Invalid; the defaults stay in effect" }, &table)?;
    Ok(if valid { Verdict::Success } else { Verdict::Failure })
}

/// The settings of the environment, and where they are from.
fn from_environment() -> (String, String) {
    let set = VARIABLES.into_iter().filter_map(|name| Some((std::env::var(name).ok()?, name)));
    let (strings, names): (Vec<String>, Vec<&str>) = set.unzip();
    if names.is_empty() {
        return (String::new(), "no variable is set".to_owned());
    }
    (strings.join(","), format!("from {}", names.join(" and ")))
}
