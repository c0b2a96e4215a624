// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"crypto/tls"
	"errors"
	"os"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/reach"
)

// Times and limits of etcd.
const (
	dynamoPrefix = "v1/"            // of the keys of Dynamo's records
	etcdPage     = 1000             // records in one answer
	etcdTime     = 10 * time.Second // for one answer
	etcdRetry    = time.Second      // after a failure
	etcdCheck    = 5 * time.Second  // between two checks that etcd answers: the client hides failures of a watch
	// etcdQuiet bounds how many views a starting worker causes: it writes a dozen records in some milliseconds.
	etcdQuiet = 50 * time.Millisecond
)

// open returns a client. It reads the files, so that renewed ones count after the next failure.
func (e *DynamoEtcd) open() (*clientv3.Client, error) {
	conf := clientv3.Config{
		Endpoints: e.Endpoints, DialTimeout: etcdTime, DialKeepAliveTime: 15 * time.Second, DialKeepAliveTimeout: etcdTime,
		PermitWithoutStream: true,
	}
	// The client logs to stderr by default; kvroute logs the failures itself.
	conf.LogConfig = newOf(conf.LogConfig)
	conf.LogConfig.Encoding = "json"
	if err := conf.LogConfig.Level.UnmarshalText([]byte("fatal")); err != nil {
		return nil, err
	}
	if e.User != "" {
		text, err := os.ReadFile(e.PasswordFile)
		if err != nil {
			return nil, err
		}
		password, _, _ := strings.Cut(string(text), "\n")
		conf.Username, conf.Password = e.User, strings.TrimSpace(password)
	}
	if e.CA != "" {
		authorities, err := reach.Authorities("etcd.ca", e.CA)
		if err != nil {
			return nil, err
		}
		conf.TLS = &tls.Config{RootCAs: authorities, MinVersion: tls.VersionTLS12}
		if e.Cert != "" {
			own, err := tls.LoadX509KeyPair(e.Cert, e.Key)
			if err != nil {
				return nil, err
			}
			conf.TLS.Certificates = []tls.Certificate{own}
		}
	}
	if e.dial != nil {
		return e.dial(conf)
	}
	return clientv3.New(conf)
}

// newOf returns a new value of the pointer's type, which saves the import of its module.
func newOf[T any](*T) *T { return new(T) }

// followEtcd follows etcd until ctx ends.
func (d *Dynamo) followEtcd(ctx context.Context) error {
	for {
		if err := d.etcdSession(ctx); ctx.Err() == nil {
			d.report(d.over, err)
		}
		if !bus.Wait(ctx, etcdRetry) {
			return nil
		}
	}
}

// etcdSession reads all records, and then their changes, until a failure. After each failure all records are read
// again: etcd may have dropped the changes meanwhile.
func (d *Dynamo) etcdSession(ctx context.Context) error {
	client, err := d.conf.Etcd.open()
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }() // it was only read
	all, revision, err := etcdRecords(ctx, client)
	if err != nil {
		return err
	}
	if d.replace(all) {
		d.view()
	}
	// Without a leader, a member would send no changes and no error.
	ctx, stop := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer stop()
	changes := client.Watch(ctx, dynamoPrefix, clientv3.WithPrefix(), clientv3.WithRev(revision+1))
	changed := false
	check := time.NewTicker(etcdCheck)
	defer check.Stop()
	for {
		var quiet <-chan time.Time
		if changed {
			quiet = time.After(etcdQuiet)
		}
		select {
		case <-ctx.Done():
			return nil
		case answer, open := <-changes:
			if !open {
				return errors.New("etcd ended the watch")
			}
			if err := answer.Err(); err != nil { // also after a compaction: the changes are gone
				return err
			}
			for _, event := range answer.Events {
				key := string(event.Kv.Key)
				if r := d.records[key]; event.Type == clientv3.EventTypeDelete && r != nil {
					changed = d.drop(key, r) || changed
				} else if event.Type != clientv3.EventTypeDelete {
					changed = d.put(key, event.Kv.Value) || changed
				}
			}
		case <-check.C:
			one, stop := context.WithTimeout(ctx, etcdTime)
			_, err := client.Get(one, dynamoPrefix, clientv3.WithCountOnly())
			stop()
			if err != nil {
				return err
			}
		case <-quiet:
			changed = false
			d.view()
		}
	}
}

// etcdRecords returns all records of one revision.
func etcdRecords(ctx context.Context, client *clientv3.Client) (all map[string][]byte, revision int64, err error) {
	all = make(map[string][]byte)
	from, end := dynamoPrefix, clientv3.GetPrefixRangeEnd(dynamoPrefix)
	for {
		one, stop := context.WithTimeout(ctx, etcdTime)
		answer, err := client.Get(one, from, clientv3.WithRange(end), clientv3.WithLimit(etcdPage), clientv3.WithRev(revision))
		stop()
		if err != nil {
			return nil, 0, err
		}
		if revision == 0 { // the first page; the others are of the same revision
			revision = answer.Header.Revision
		}
		for _, kv := range answer.Kvs {
			all[string(kv.Key)] = kv.Value
			from = string(kv.Key) + "\x00"
		}
		if !answer.More || len(answer.Kvs) == 0 {
			return all, revision, nil
		}
	}
}
