// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
)

// startBus starts a NATS server in this process, which stores in files.
func startBus() (url string, stop func() error, err error) {
	dir, err := os.MkdirTemp("", "kvroute-bench-")
	if err != nil {
		return "", nil, err
	}
	remove := func() error { return os.RemoveAll(dir) }
	s, err := natsserver.NewServer(&natsserver.Options{Host: "127.0.0.1", Port: natsserver.RANDOM_PORT, JetStream: true, StoreDir: dir, NoSigs: true, NoLog: true})
	if err != nil {
		return "", nil, errors.Join(err, remove())
	}
	go s.Start()
	stop = func() error {
		s.Shutdown()
		s.WaitForShutdown()
		return remove()
	}
	if !s.ReadyForConnections(10 * time.Second) {
		return "", nil, errors.Join(errors.New("NATS does not start"), stop())
	}
	return s.ClientURL(), stop, nil
}

// ServeBus runs a NATS server until in ends. It writes a line with its URL to out, and for
// each line of in one with the microseconds that the cores have worked for it so far.
func ServeBus(in io.Reader, out io.Writer) (err error) {
	url, stop, err := startBus()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	if _, err := fmt.Fprintln(out, url); err != nil {
		return err
	}
	asked := bufio.NewScanner(in)
	for asked.Scan() {
		if _, err := fmt.Fprintln(out, CPUTime().Microseconds()); err != nil {
			return err
		}
	}
	return asked.Err()
}

// busProcess is a NATS server in a process of its own, as fleets have it.
type busProcess struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
	url string
}

// startBusProcess starts a command that does what [ServeBus] does.
func startBusProcess(command []string) (*busProcess, error) {
	b := &busProcess{cmd: exec.Command(command[0], command[1:]...)}
	b.cmd.Stderr = os.Stderr
	in, err := b.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := b.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	b.in, b.out = in, bufio.NewScanner(out)
	if err := b.cmd.Start(); err != nil {
		return nil, err
	}
	if b.url, err = b.line(); err != nil {
		return nil, errors.Join(err, b.stop())
	}
	return b, nil
}

func (b *busProcess) line() (string, error) {
	if !b.out.Scan() {
		return "", errors.Join(errors.New("the NATS server's process says nothing"), b.out.Err())
	}
	return b.out.Text(), nil
}

// cpu returns how long the cores have worked for it.
func (b *busProcess) cpu() (time.Duration, error) {
	if _, err := fmt.Fprintln(b.in); err != nil {
		return 0, err
	}
	text, err := b.line()
	if err != nil {
		return 0, err
	}
	us, err := strconv.ParseInt(text, 10, 64)
	return time.Duration(us) * time.Microsecond, err
}

// stop ends it, and waits for that.
func (b *busProcess) stop() error { return errors.Join(b.in.Close(), b.cmd.Wait()) }
