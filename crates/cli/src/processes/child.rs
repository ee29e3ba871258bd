//! The second process, as the first one sees it: messages of one line each way, and no wait without a time limit.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use warpool_conformance::{CheckError, CheckResult};

use super::peer::{DONE, FAILED};

/// Time limit for the exit of a process that was killed or has closed its output.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// The second process. Killed if it is dropped while it runs.
pub struct ChildProcess {
    child: Child,
    lines: Receiver<String>,
    timeout: Duration,
    deadline: Instant,
}

impl ChildProcess {
    /// Starts it. `timeout` limits everything that it does.
    pub fn start(mut command: Command, timeout: Duration) -> CheckResult<Self> {
        let deadline = Instant::now() + timeout;
        let mut child = command
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| CheckError::Failed(format!("cannot start a second process: {error}")))?;
        let (sender, lines) = channel();
        if let Some(output) = child.stdout.take() {
            // A pipe cannot be read with a time limit, a channel can. The thread ends with the output of the process.
            std::thread::spawn(move || {
                let _ = BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| sender.send(line));
            });
        }
        Ok(Self { child, lines, timeout, deadline })
    }

    /// Sends a message.
    pub fn send(&mut self, message: &str) {
        if let Some(input) = &mut self.child.stdin {
            // Fails if the process has ended; the next `expect_message` reports why.
            let _ = writeln!(input, "{message}");
        }
    }

    /// The next message must be `message`.
    pub fn expect_message(&mut self, message: &str) -> CheckResult {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let failure = match self.lines.recv_timeout(left) {
            Ok(received) if received == message => return Ok(()),
            Ok(received) => match received.strip_prefix(FAILED) {
                Some(reason) => format!("the second process failed: {reason}"),
                None => format!("expected '{message}' from the second process, got '{received}'"),
            },
            Err(RecvTimeoutError::Timeout) => {
                format!("no '{message}' from the second process within {} s", self.timeout.as_secs_f32())
            }
            Err(RecvTimeoutError::Disconnected) => {
                let status = self.wait_for_exit().map_or("still running".to_owned(), |status| status.to_string());
                format!("the second process ended before '{message}' ({status})")
            }
        };
        Err(CheckError::Failed(failure))
    }

    /// It must report that it is done, and exit with success.
    pub fn finish(mut self) -> CheckResult {
        self.expect_message(DONE)?;
        match self.wait_for_exit() {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(CheckError::Failed(format!("the second process was done, but ended with {status}"))),
            None => Err(CheckError::Failed("the second process was done, but did not exit".to_owned())),
        }
    }

    /// Its exit status, if it exits within the time limit.
    fn wait_for_exit(&mut self) -> Option<ExitStatus> {
        let until = Instant::now() + EXIT_TIMEOUT;
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

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // Does nothing to a process that has ended. A process that hangs in the driver may survive the signal.
        if self.child.kill().is_ok() {
            self.wait_for_exit();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, timeout: Duration) -> ChildProcess {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::piped());
        ChildProcess::start(command, timeout).expect("a shell")
    }

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn messages_go_both_ways() {
        let mut child = shell("echo ready; read word; echo \"received $word\"; echo done", LONG);
        child.expect_message("ready").unwrap();
        child.send("recorded");
        child.expect_message("received recorded").unwrap();
        child.finish().unwrap();
    }

    #[test]
    fn failures_of_the_child_are_reported() {
        let check = |script: &str, expected: &str| {
            let text = shell(script, LONG).finish().unwrap_err().to_string();
            assert!(text.contains(expected), "{script}: {text}");
        };
        check("echo 'failed: no such event'", "the second process failed: no such event");
        check("echo nonsense", "expected 'done' from the second process, got 'nonsense'");
        check("exit 3", "ended before 'done' (exit status: 3)");
        check("kill -9 $$", "ended before 'done' (signal: 9");
        check("echo done; exit 4", "was done, but ended with exit status: 4");
    }

    #[test]
    fn child_that_hangs_is_killed() {
        let mut child = shell("exec sleep 600", Duration::from_millis(20));
        let text = child.expect_message("ready").unwrap_err().to_string();
        assert!(text.contains("no 'ready' from the second process within 0.02 s"), "{text}");
        let id = child.child.id();
        drop(child);
        assert!(!std::path::Path::new(&format!("/proc/{id}")).exists(), "process {id} still exists");
    }

    #[test]
    fn child_that_cannot_be_started_is_a_failure() {
        let text = ChildProcess::start(Command::new("/no/such/binary"), LONG).err().map(|error| error.to_string());
        assert!(text.is_some_and(|text| text.contains("cannot start a second process")));
    }
}
