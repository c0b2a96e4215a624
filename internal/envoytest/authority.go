// SPDX-License-Identifier: Apache-2.0

package envoytest

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
	"time"
)

// Authority makes certificates for tests.
type Authority struct {
	t    TB
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	der  []byte
}

// NewAuthority returns an authority with a new key.
func NewAuthority(t TB) *Authority {
	t.Helper()
	a := &Authority{t: t}
	a.cert = &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "a test's authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	a.key = a.newKey()
	a.der = a.sign(a.cert, a.cert, &a.key.PublicKey)
	return a
}

// PEM returns the authority's own certificate.
func (a *Authority) PEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.der})
}

// Write writes a certificate for a name, its key and the authority's certificate into a folder:
// name.pem, name.key and ca.pem. It returns their paths.
func (a *Authority) Write(dir, name string) (cert, key, ca string) {
	a.t.Helper()
	private := a.newKey()
	der := a.sign(&x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, a.cert, &private.PublicKey)
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		a.t.Fatalf("envoytest: %v", err)
	}
	cert, key, ca = filepath.Join(dir, name+".pem"), filepath.Join(dir, name+".key"), filepath.Join(dir, "ca.pem")
	for path, data := range map[string][]byte{
		cert: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		key:  pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}),
		ca:   a.PEM(),
	} {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			a.t.Fatalf("envoytest: %v", err)
		}
	}
	return cert, key, ca
}

func (a *Authority) newKey() *ecdsa.PrivateKey {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatalf("envoytest: %v", err)
	}
	return key
}

func (a *Authority) sign(c, parent *x509.Certificate, key *ecdsa.PublicKey) []byte {
	der, err := x509.CreateCertificate(rand.Reader, c, parent, key, a.key)
	if err != nil {
		a.t.Fatalf("envoytest: %v", err)
	}
	return der
}
