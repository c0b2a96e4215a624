// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// certAuthority makes certificates for tests.
type certAuthority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	der  []byte
}

// newAuthority returns an authority with a new key.
func newAuthority(t *testing.T) *certAuthority {
	t.Helper()
	a := &certAuthority{t: t}
	a.cert = &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "a test's authority"},
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	a.key = a.newKey()
	a.der = a.sign(a.cert, &a.key.PublicKey)
	return a
}

// pem returns the authority's own certificate.
func (a *certAuthority) pem() []byte { return encodePEM("CERTIFICATE", a.der) }

// write writes a certificate for a name, its key and the authority's certificate into a folder:
// name.pem, name.key and ca.pem. It returns their paths.
func (a *certAuthority) write(dir, name string) (cert, key, ca string) {
	a.t.Helper()
	private := a.newKey()
	der := a.sign(&x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, &private.PublicKey)
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	a.check(err)
	cert, key, ca = filepath.Join(dir, name+".pem"), filepath.Join(dir, name+".key"), filepath.Join(dir, "ca.pem")
	a.check(os.WriteFile(cert, encodePEM("CERTIFICATE", der), 0o600))
	a.check(os.WriteFile(key, encodePEM("PRIVATE KEY", secret), 0o600))
	a.check(os.WriteFile(ca, a.pem(), 0o600))
	return cert, key, ca
}

func encodePEM(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

func (a *certAuthority) newKey() *ecdsa.PrivateKey {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	a.check(err)
	return key
}

// sign returns a certificate that is valid for two hours, one of which has passed.
func (a *certAuthority) sign(c *x509.Certificate, key *ecdsa.PublicKey) []byte {
	c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, key, a.key)
	a.check(err)
	return der
}

func (a *certAuthority) check(err error) {
	a.t.Helper()
	if err != nil {
		a.t.Fatal(err)
	}
}
