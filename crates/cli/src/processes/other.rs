//! This process's end of the talk with the other one: words in, words out, one per line, and no wait without an end.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use warpool_conformance::{CheckError, CheckResult};

use super::peer::{DONE, FAILED};

/// How long a process that was killed, or has closed its output, is waited for.
const REAP: Duration = Duration::from_secs(5);

/// The other process. Killed if it is dropped before it has ended.
pub struct Other {
    child: Child,
    lines: Receiver<String>,
    limit: Duration,
    deadline: Instant,
}

impl Other {
    /// Starts it. All that it does must be done within `limit`.
    pub fn start(mut command: Command, limit: Duration) -> CheckResult<Self> {
        let deadline = Instant::now() + limit;
        let mut child = command
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| CheckError::Failed(format!("a second process cannot be started: {error}")))?;
        let (sender, lines) = channel();
        if let Some(output) = child.stdout.take() {
            // A pipe cannot be read with a limit, a channel can. The thread ends with the process's output.
            std::thread::spawn(move || {
                let _ = BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| sender.send(line));
            });
        }
        Ok(Self { child, lines, limit, deadline })
    }

    /// Says a word.
    pub fn tell(&mut self, word: &str) {
        if let Some(input) = &mut self.child.stdin {
            // Fails if the process is gone; why it is gone, the next `expect` says.
            let _ = writeln!(input, "{word}");
        }
    }

    /// The next word must be `word`.
    pub fn expect(&mut self, word: &str) -> CheckResult {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let wrong = match self.lines.recv_timeout(left) {
            Ok(said) if said == word => return Ok(()),
            Ok(said) => match said.strip_prefix(FAILED) {
                Some(reason) => format!("the other process failed: {reason}"),
                None => format!("the other process should have said '{word}', but said '{said}'"),
            },
            Err(RecvTimeoutError::Timeout) => {
                format!("the other process did not say '{word}' within {} s", self.limit.as_secs_f32())
            }
            Err(RecvTimeoutError::Disconnected) => {
                let status = self.reap().map_or("still running".to_owned(), |status| status.to_string());
                format!("the other process ended and never said '{word}' ({status})")
            }
        };
        Err(CheckError::Failed(wrong))
    }

    /// It must say that it is done, and end well.
    pub fn finish(mut self) -> CheckResult {
        self.expect(DONE)?;
        match self.reap() {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(CheckError::Failed(format!("the other process was done, but ended with {status}"))),
            None => Err(CheckError::Failed("the other process was done, but did not end".to_owned())),
        }
    }

    /// How it ended, if it does so soon.
    fn reap(&mut self) -> Option<ExitStatus> {
        let until = Instant::now() + REAP;
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            if Instant::now() >= until {
                return None;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // Nothing happens to a process that has ended. One that a driver holds even when killed is left to the system.
        if self.child.kill().is_ok() {
            self.reap();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Other {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::piped());
        Other::start(command, limit).expect("a shell")
    }

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn words_go_both_ways() {
        let mut other = shell("echo ready; read word; echo \"heard $word\"; echo done", LONG);
        other.expect("ready").unwrap();
        other.tell("recorded");
        other.expect("heard recorded").unwrap();
        other.finish().unwrap();
    }

    #[test]
    fn what_goes_wrong_over_there_is_told_here() {
        let check = |script: &str, said: &str| {
            let text = shell(script, LONG).finish().unwrap_err().to_string();
            assert!(text.contains(said), "{script}: {text}");
        };
        check("echo 'failed: no such event'", "the other process failed: no such event");
        check("echo nonsense", "should have said 'done', but said 'nonsense'");
        check("exit 3", "never said 'done' (exit status: 3)");
        check("kill -9 $$", "never said 'done' (signal: 9");
        check("echo done; exit 4", "was done, but ended with exit status: 4");
    }

    #[test]
    fn a_process_that_hangs_is_given_up_and_killed() {
        let mut other = shell("exec sleep 600", Duration::from_millis(20));
        let text = other.expect("ready").unwrap_err().to_string();
        assert!(text.contains("did not say 'ready' within 0.02 s"), "{text}");
        let id = other.child.id();
        drop(other);
        assert!(!std::path::Path::new(&format!("/proc/{id}")).exists(), "process {id} is still there");
    }

    #[test]
    fn a_process_that_cannot_be_started_is_a_failure() {
        let text = Other::start(Command::new("/no/such/binary"), LONG).err().map(|stop| stop.to_string());
        assert!(text.is_some_and(|text| text.contains("cannot be started")));
    }
}
